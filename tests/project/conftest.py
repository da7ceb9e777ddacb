"""A running gateway for what is written in the README."""

from tests.gateway.conftest import make_strop, strop, toy_base

__all__ = ["make_strop", "strop", "toy_base"]
