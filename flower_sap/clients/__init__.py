"""The client side: the mod, and the tasks that emulated nodes train."""
