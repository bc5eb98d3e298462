"""One file per method: the file name is the method's name, the class in it is `Method`."""
