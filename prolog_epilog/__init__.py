"""What runs on a node: the node agent, and the prolog, epilog and task programs that ask it."""
