{{- /* A Service's name begins with a letter and has no dot; a release's may not, and may. */}}
{{- define "shoal.name" -}}
{{- $own := regexMatch "^[a-z]" .Release.Name | ternary .Release.Name (printf "shoal-%s" .Release.Name) }}
{{- .Values.fullnameOverride | default .Values.nameOverride | default $own | replace "." "-" | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- define "shoal.serviceAccount" -}}{{ .Values.serviceAccount.name | default (include "shoal.name" .) }}{{- end }}
{{- define "shoal.pools.name" -}}{{ printf "%s-pools" (include "shoal.name" .) }}{{- end }}
{{- define "shoal.pools.serviceAccount" -}}{{ .Values.pools.serviceAccount.name | default (include "shoal.pools.name" .) }}{{- end }}
{{- define "shoal.pools.selector" -}}
app.kubernetes.io/name: shoal-pools
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}
{{- define "shoal.pools.labels" -}}
{{ include "shoal.pools.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- define "shoal.installKey" -}}{{ .Values.installKey.existingSecret | default (printf "%s-install-key" (include "shoal.name" .)) }}{{- end }}
{{- define "shoal.selector" -}}
app.kubernetes.io/name: shoal
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}
{{- define "shoal.labels" -}}
{{ include "shoal.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- define "shoal.image" -}}
{{- $repository := required "image.repository is not set: no image is published yet. `make images REGISTRY=registry.example.com/team` builds them and prints the values" .Values.image.repository }}
{{- if .Values.image.digest }}{{ printf "%s@%s" $repository .Values.image.digest }}{{ else }}{{ printf "%s:%s" $repository (.Values.image.tag | default .Chart.AppVersion) }}{{ end }}
{{- end }}
{{- /* The account of the operator as the API server sees it. */}}
{{- define "shoal.username" -}}system:serviceaccount:{{ .Release.Namespace }}:{{ include "shoal.serviceAccount" . }}{{- end }}
{{- /* How a monitor scrapes; of its values. */}}
{{- define "shoal.scrape" -}}
interval: {{ .interval }}
{{- with .scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
{{- with .relabelings }}
relabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Probes come from the nodes, whose addresses no selector has; the health port says no more than that it is up. */}}
{{- define "shoal.admitted" -}}
- ports: [{port: health}]
- ports:
    {{- range .ports }}
    - {port: {{ . }}}
    {{- end }}
  {{- with .from }}
  from: {{- toYaml . | nindent 4 }}
    - {podSelector: {matchLabels: {{ $.check | fromYaml | toJson }}}}
  {{- end }}
{{- end }}
{{- define "shoal.check.selector" -}}
app.kubernetes.io/name: shoal-check
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}
{{- /* Replicas (of a selector) prefer different nodes, and none that the cloud may take: what replaces lost pods must not go with them. */}}
{{- define "shoal.affinity" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- . | nindent 12 }}
nodeAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      preference:
        matchExpressions:
          - {key: cloud.google.com/gke-spot, operator: NotIn, values: ["true"]}
          - {key: cloud.google.com/gke-preemptible, operator: NotIn, values: ["true"]}
          - {key: cloud.google.com/gke-provisioning, operator: NotIn, values: [spot, preemptible]}
          - {key: eks.amazonaws.com/capacityType, operator: NotIn, values: [SPOT]}
          - {key: karpenter.sh/capacity-type, operator: NotIn, values: [spot]}
          - {key: kubernetes.azure.com/scalesetpriority, operator: NotIn, values: [spot]}
{{- end }}
