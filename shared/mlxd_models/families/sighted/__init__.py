"""Families that see: a tower over pixels beside a decoder over tokens."""
