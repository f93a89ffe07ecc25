"""A study: trials of one training job with different options, side by side on the ranks' cores."""
