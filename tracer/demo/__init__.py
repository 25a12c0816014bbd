"""The whole job on one machine without a GPU: stand, protocol, bundle, table."""
