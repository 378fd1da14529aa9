"""The only home of collectives on activations and of checks between ranks."""
