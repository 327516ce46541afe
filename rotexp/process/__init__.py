"""The process: signals that end it, arguments it is given, exit codes it ends with."""
