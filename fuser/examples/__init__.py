"""Examples that run: `python -m fuser.examples.digits`."""
