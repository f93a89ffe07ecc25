"""The command line toolkit of both ``cli/`` folders: parser, progress, tables, output."""
