"""The controller of SpeedProfiles: merges what coordinators report into one object for each model of a namespace."""
