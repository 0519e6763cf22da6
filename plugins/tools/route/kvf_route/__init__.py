"""`kvframework route`: a separate process that follows the events of many nodes and answers over HTTP how much of a
prompt each of them holds."""
