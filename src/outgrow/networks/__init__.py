"""The networks that the papers and the field measure with, built layer by layer as in their papers."""

from outgrow.networks.catalog import find, names
from outgrow.networks.network import Network

__all__ = ["Network", "find", "names"]
