"""`lightning-cp demo`: a small GPT trained by a group of processes and by one, and compared.

`command` is the user's side and never trains; `worker` is a program of its own that trains once;
`model` and `data` are what it trains; `report` and `picture` show how the two runs compare.
"""
