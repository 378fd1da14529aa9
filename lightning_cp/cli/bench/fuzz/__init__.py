"""`lightning-cp bench fuzz`: random attention calls against plain maths."""
