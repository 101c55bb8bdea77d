"""What works here: each module holds the checks of one kind. None imports torch, MPI or Horovod into this process."""
