"""`kvframework observe`: a separate process that asks a server for its status and answers HTTP:
metrics, health, history and a page. Nothing of it runs in the server but the supervision of that process."""
