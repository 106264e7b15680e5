{{- /* A Service's name begins with a letter; a release's may not. */}}
{{- define "shoal.name" -}}
{{ regexMatch "^[a-z]" .Release.Name | ternary .Release.Name (printf "shoal-%s" .Release.Name) | trunc 50 | trimSuffix "-" }}
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
{{- end }}
