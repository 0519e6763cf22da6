"""`kvframework run -- ENGINE ...`: find or start the server of this user, connect the engine, become it."""
