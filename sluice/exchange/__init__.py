"""What nodes and controllers exchange: records, readings, health reports; how they are sent and received."""
