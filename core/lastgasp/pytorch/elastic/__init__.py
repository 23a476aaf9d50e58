"""Training that goes on with fewer ranks: the micro-batches of the missing ones are done by the others."""
