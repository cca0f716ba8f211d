"""Other processes: engines, actors, environments and replays that live there. Only `remote.ray` knows Ray."""
