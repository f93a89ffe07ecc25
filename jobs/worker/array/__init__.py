"""An array: one program run many times with other variables, side by side on the ranks' cores."""
