"""What waits in groups, on SQLite and PostgreSQL."""

from gateway.store import Database


def test_groups_of_before_know_what_waits_in_them(empty_url: str):
    database = Database(empty_url)
    database.migrate("0007")
    members = [
        ("full", "train", "true", "open", 10.0),
        ("full", "train", "true", "open", 7.0),
        ("full", "train", "false", "open", 5.0),
        ("full", "eval", "true", "open", 1.0),
        ("full", "train", "true", "used", 2.0),
        ("done", "train", "true", "skipped", 3.0),
    ]
    with database.write() as connection:
        for group in ("full", "done"):
            connection.exec_driver_sql(
                "insert into groups (project, policy, id, created_at, updated_at) "
                f"values ('default', 'agent', '{group}', 1.0, 2.0)"
            )
        for number, (group, split, rewarded, state, created_at) in enumerate(members):
            connection.exec_driver_sql(
                "insert into trajectories (project, id, policy, group_id, split, attribution, "
                "rewarded, state, created_at, updated_at) values ('default', "
                f"'t{number}', 'agent', '{group}', '{split}', 'path', {rewarded}, '{state}', "
                f"{created_at}, 11.0)"
            )
    database.migrate("0008")
    query = "select id, waiting, oldest_at, choices from groups order by id"
    with database.read() as connection:
        found = [tuple(row) for row in connection.exec_driver_sql(query)]
    assert found == [("done", 0, None, None), ("full", 2, 5.0, None)]
    database.dispose()
