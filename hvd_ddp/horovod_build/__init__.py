"""What install-horovod does to Horovod's source, and what is known of the Horovod that is installed."""
