"""ClientApps, one per kind of client; all logic is in `flower_sap`."""
