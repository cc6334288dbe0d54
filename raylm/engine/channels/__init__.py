"""Lines between processes of one node that take less of its cores than Ray's: Unix sockets."""
