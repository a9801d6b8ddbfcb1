"""Ready-made environments: use them as they are, or derive from them."""

from populace.environments.auction import Auction
from populace.environments.chat import ChatRoom
from populace.environments.group import Group
from populace.environments.map import Map
from populace.environments.social import SocialGraph
from populace.environments.store import AttributeStore
from populace.environments.timeline import Timeline

__all__ = [
    "AttributeStore",
    "Auction",
    "ChatRoom",
    "Group",
    "Map",
    "SocialGraph",
    "Timeline",
]
