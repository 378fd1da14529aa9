"""`lightning-cp bench`: measurements on this machine."""
