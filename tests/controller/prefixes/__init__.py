"""Tests of one budget for what all models keep of prompts on disk."""
