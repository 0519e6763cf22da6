"""The command line. Each command is a module with `register(app)`; heavy imports happen inside the commands."""
