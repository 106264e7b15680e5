"""Access to the cluster: a client, caches kept up to date by reflectors, a Lease."""
