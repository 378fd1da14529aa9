"""The command line: `lightning-cp`."""
