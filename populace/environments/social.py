"""A social graph: who follows whom, posts, and what each gets to see."""

from __future__ import annotations

from typing import Any, Literal

from populace.environment import Environment, event, readonly
from shared.errors import InvalidInputError

Ranking = Literal["recent", "popular", "mixed"]
_RANKINGS = ("recent", "popular", "mixed")
_MOST_SHOWN, _MOST_EDGES = 200, 2000
_HALF_LIFE = 20.0
"""Posts after which, in a mixed feed, a like weighs half as much."""


def _networkx() -> Any:
    try:
        import networkx
    except ImportError:
        raise InvalidInputError(
            "SocialGraph needs networkx: pip install 'populace[worlds]'"
        ) from None
    return networkx


class SocialGraph(Environment):
    """A network in which members follow, post, like and read.

    Args:
        keep: posts kept; older ones are let go.

    Events: ``follow(whom)``, ``posted(number, author, text)``, ``liked(number, author, by)``.

    Raises:
        InvalidInputError: networkx is not installed.
    """

    def __init__(self, *, keep: int = 10_000) -> None:
        self.keep = keep
        self.graph = _networkx().DiGraph()
        """An edge from each member to everyone whom it follows."""
        self.posts: dict[int, dict[str, Any]] = {}
        self.count = 0

    def connect(
        self, members: list[str], kind: str = "watts_strogatz", mean_degree: int = 6
    ) -> int:
        """Make members follow one another at random, reproducibly; returns the number of links.

        Args:
            members: their names.
            kind: ``"watts_strogatz"`` (small world, a tenth of the links rewired) or
                ``"barabasi_albert"`` (a few with very many links), as networkx makes them.
            mean_degree: neighbours of each, in the mean.

        Raises:
            ValueError: there is no such kind, or there are too few members for it.
        """
        nx, seed = _networkx(), self.random.randrange(1 << 31)
        if mean_degree < 2 or len(members) <= mean_degree:
            raise ValueError(f"{len(members)} members can't have {mean_degree} neighbours each")
        if kind == "watts_strogatz":
            made = nx.connected_watts_strogatz_graph(len(members), mean_degree, 0.1, seed=seed)
        elif kind == "barabasi_albert":
            made = nx.barabasi_albert_graph(len(members), mean_degree // 2, seed=seed)
        else:
            raise ValueError(f"there is no graph of kind {kind!r}")
        self.graph.add_nodes_from(members)
        for a, b in made.edges:
            self.graph.add_edge(members[a], members[b])
            self.graph.add_edge(members[b], members[a])
        return int(self.graph.number_of_edges())

    def join(self, name: str = "") -> None:
        """Become a member."""
        self.graph.add_node(self._who(name))

    @event
    def follow(self, whom: str, name: str = "") -> None:
        """See someone's posts from now on.

        Raises:
            LookupError: one of both is no member.
            ValueError: they are the same.
        """
        who = self._member(self._who(name))
        if who == self._member(whom):
            raise ValueError(f"{who} can't follow itself")
        self.graph.add_edge(who, whom)

    def unfollow(self, whom: str, name: str = "") -> bool:
        """See someone's posts no longer; returns whether one did."""
        who = self._who(name)
        if not self.graph.has_edge(who, whom):
            return False
        self.graph.remove_edge(who, whom)
        return True

    def post(self, text: str, name: str = "") -> int:
        """Say something to one's followers; returns the post's number, from 1.

        Raises:
            LookupError: the author is no member.
        """
        author = self._member(self._who(name))
        self.count += 1
        self.posts[self.count] = {
            "number": self.count,
            "author": author,
            "text": text,
            "round": self.round,
            "likes": [],
        }
        self.posts.pop(self.count - self.keep, None)
        self.emit("posted", None, number=self.count, author=author, text=text)
        return self.count

    def like(self, number: int, name: str = "") -> int:
        """Like a post, once; returns how many do.

        Raises:
            LookupError: there is no such post (any more).
        """
        who = self._member(self._who(name))
        post = self.posts.get(number)
        if post is None:
            raise LookupError(f"{self.path} has no post {number}")
        if who not in post["likes"]:
            post["likes"].append(who)
            self.emit("liked", None, number=number, author=post["author"], by=who)
        return len(post["likes"])

    def feed(
        self, most: int = 10, ranking: Ranking = "recent", name: str = ""
    ) -> list[dict[str, Any]]:
        """Posts of those whom one follows: number, author, text, round, likes (their count).

        Args:
            most: how many.
            ranking: newest first, most liked first, or both mixed: likes, halved with every 20
                posts since.
            name: whose feed; default: the calling agent's.

        Raises:
            LookupError: that is no member.
            ValueError: there is no such ranking.
        """
        if ranking not in _RANKINGS:
            raise ValueError(f"there is no ranking {ranking!r} (there are: {_RANKINGS})")
        who = self._member(self._who(name))
        followed = set(self.graph.successors(who))
        seen = [post for post in self.posts.values() if post["author"] in followed]
        seen.sort(key=lambda post: self._rank(post, ranking), reverse=True)
        return [{**post, "likes": len(post["likes"])} for post in seen[:most]]

    def _rank(self, post: dict[str, Any], ranking: str) -> tuple[float, int]:
        likes, number = len(post["likes"]), post["number"]
        if ranking == "recent":
            return 0.0, number
        if ranking == "popular":
            return float(likes), number
        return (likes + 1) * 0.5 ** ((self.count - number) / _HALF_LIFE), number

    @readonly
    def followers(self, name: str) -> list[str]:
        """Who follows someone."""
        return sorted(self.graph.predecessors(self._member(name)))

    @readonly
    def following(self, name: str) -> list[str]:
        """Whom someone follows."""
        return sorted(self.graph.successors(self._member(name)))

    @readonly
    def measures(self) -> dict[str, Any]:
        """Members, links, reciprocity, clustering, and the most followed."""
        nx, graph = _networkx(), self.graph
        top = sorted(graph.in_degree, key=lambda row: (-row[1], row[0]))[:5]
        return {
            "members": graph.number_of_nodes(),
            "links": graph.number_of_edges(),
            "reciprocity": nx.overall_reciprocity(graph) if graph.number_of_edges() else 0.0,
            "clustering": nx.average_clustering(graph.to_undirected()) if len(graph) else 0.0,
            "most_followed": [list(row) for row in top],
            "posts": self.count,
        }

    def view(self) -> dict[str, Any]:
        """See ``Environment.view``; of a large network, those who are followed most."""
        graph = self.graph
        top = sorted(graph.in_degree, key=lambda row: (-row[1], row[0]))[:_MOST_SHOWN]
        names = {name for name, _ in top}
        edges = [[a, b] for a, b in graph.subgraph(names).edges][:_MOST_EDGES]
        return {
            "kind": "graph",
            "nodes": [[name, degree] for name, degree in top],
            "edges": edges,
            "left_out": graph.number_of_nodes() - len(names),
            "posts": [
                {**post, "likes": len(post["likes"])} for post in list(self.posts.values())[-50:]
            ],
        }

    def _who(self, name: str) -> str:
        who = name or self.caller
        if not who:
            raise ValueError("say who is meant: name=")
        return who

    def _member(self, name: str) -> str:
        if name not in self.graph:
            raise LookupError(f"{name!r} is no member of {self.path}; join first")
        return name

    def snapshot(self) -> dict[str, Any]:
        """See ``Environment.snapshot``."""
        return {
            **vars(self),
            "graph": [list(self.graph.nodes), [list(edge) for edge in self.graph.edges]],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See ``Environment.restore``."""
        nodes, edges = state["graph"]
        graph = _networkx().DiGraph()
        graph.add_nodes_from(nodes)
        graph.add_edges_from(edges)
        super().restore({**state, "graph": graph})
