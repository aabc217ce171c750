"""What tests share. It imports nothing: programs that fork must not have started a thread, as polars does."""
