"""Where a trajectory is to be read in Langfuse."""

from sqlalchemy import Connection

from gateway.tracing import trees


def traces(connection: Connection, project: str, trajectory_id: str) -> list[str]:
    """The traces that hold a trajectory's completions, in the order in which they go on.

    One as a rule. What is too long for one trace of Langfuse's is in several; a sub-agent is in
    those of the trajectory that started it, and a completion whose caller traces itself in the
    caller's. Reads the whole family of the trajectory, without token arrays.
    """
    families = trees.read(connection, project, [trajectory_id])
    completions = families.nodes[trajectory_id].completions
    found = dict.fromkeys(families.place_of(one).trace_id for one in completions)
    return list(found) or [families.place(trajectory_id).trace_id]
