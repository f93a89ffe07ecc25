"""Software stacks as data: TOML files, checked and locked. ``load.py`` reads them."""
