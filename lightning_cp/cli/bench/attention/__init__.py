"""`lightning-cp bench attention`: distributed attention against the bare kernel calls of a rank."""
