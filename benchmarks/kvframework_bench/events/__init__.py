"""`kvframework bench events`: what it costs to tell routers what a server holds."""
