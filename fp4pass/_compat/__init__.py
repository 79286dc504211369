"""Private APIs of other libraries, one file a library; nothing else in fp4pass reaches them."""
