"""Into a running scheduler that was started without kvwitness: what must hold, and the injection itself."""
