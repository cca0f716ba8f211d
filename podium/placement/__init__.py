"""Where an agent's functions run: the only place with meshes, threads and queues."""
