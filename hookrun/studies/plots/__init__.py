"""What a `Run` draws and shows: the pictures of its page, and the page itself."""
