"""What runs inside the LMCache MP server."""
