"""What can be said of a server that is only looked at from outside: nothing of it is touched."""
