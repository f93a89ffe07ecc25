"""``report``: one page with charts from a results folder. Pure, except for reading the folder."""
