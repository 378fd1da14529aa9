"""`lightning-cp bench calibrate`."""
