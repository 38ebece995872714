"""ServerApps, one per named strategy; all logic is in `flower_sap`."""
