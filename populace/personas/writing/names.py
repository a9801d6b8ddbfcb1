"""Names for people, by locale and gender, from faker; the same for the same seed and row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from shared.errors import InvalidInputError

FEMALE = frozenset(("female", "woman", "girl", "f", "女", "女性"))
MALE = frozenset(("male", "man", "boy", "m", "男", "男性"))


def gender_of(row: Mapping[str, Any]) -> str | None:
    """Either "female" or "male", as the row's gender (or sex) says; None if it says neither."""
    for column in ("gender", "sex", "性别"):
        value = str(row.get(column, "")).strip().lower()
        if value in FEMALE:
            return "female"
        if value in MALE:
            return "male"
    return None


class Names:
    """Draws names.

    Args:
        locale: as faker names it, such as "en_US", "zh_CN", "de_DE".
        seed: what the draws follow from.

    Raises:
        InvalidInputError: faker isn't installed, or knows no such locale.
    """

    def __init__(self, locale: str, seed: int) -> None:
        try:
            from faker import Faker
            from faker.config import AVAILABLE_LOCALES
        except ImportError as error:
            raise InvalidInputError(
                f"names need faker ({error}): pip install 'populace[personas]'"
            ) from None
        if locale not in AVAILABLE_LOCALES:
            raise InvalidInputError(
                f"there are no names for {locale!r}; locales are such as "
                f"{', '.join(sorted(AVAILABLE_LOCALES)[:6])}, de_DE, en_GB, en_US, zh_CN"
            )
        self._faker = Faker(locale)
        self._seed = seed
        self._family_first = locale[:2] in ("zh", "ja", "ko")

    def name(self, row_number: int, gender: str | None) -> str:
        """One person's name: first and last, without titles, which might contradict the row."""
        digest = hashlib.blake2b(f"{self._seed}/{row_number}".encode(), digest_size=8).digest()
        self._faker.seed_instance(int.from_bytes(digest, "big"))
        first = getattr(self._faker, f"first_name_{gender}", self._faker.first_name)()
        last = self._faker.last_name()
        return f"{last}{first}" if self._family_first else f"{first} {last}"
