"""``report``: one page, and pictures, from a results folder. Everything here is pure but the reading."""
