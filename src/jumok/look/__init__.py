"""What people look at: pictures of attention and of scores."""
