"""Dynamic facility location: prototypes that stay good and stable while clients come and go."""
