"""The message bus: one contract, a NATS client and an in-memory twin that keep it."""

from shared.bus.base import (
    Bus,
    Consumer,
    Delivery,
    Entry,
    Handler,
    KeyValue,
    Message,
    StreamSpec,
    Subscription,
    keep_alive,
)
from shared.bus.facts import BrokerFacts
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.nats import NatsBus

__all__ = [
    "BrokerFacts",
    "Bus",
    "Consumer",
    "Delivery",
    "Entry",
    "Handler",
    "KeyValue",
    "MemoryBroker",
    "MemoryBus",
    "Message",
    "NatsBus",
    "StreamSpec",
    "Subscription",
    "keep_alive",
]
