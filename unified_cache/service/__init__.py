"""The gRPC service: one store for many engines, safe by default."""
