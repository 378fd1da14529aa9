"""The benchmark of gathers of sharded parameters beside the traffic of attention."""
